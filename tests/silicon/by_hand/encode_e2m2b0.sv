// Codes of Float(2, 2, bias=0), saturating, from bfloat16, rounded to nearest, ties to even: written by hand, the reference for the cost of
// emitted modules. There are no infinities and no NaN; the largest value is 14.
module encode_e2m2b0 (
  input wire [15:0] x,
  output wire [4:0] y
);
  wire [7:0] exponent = x[14:7];
  wire is_nan = exponent == 8'd255 && x[6:0] != 7'd0;

  // Below 2 there are the subnormal values, in steps of 0.5.
  wire is_normal = exponent >= 8'd128;
  wire [3:0] significand = {1'b1, x[6:4]};
  wire [1:0] shift = exponent == 8'd127 ? 2'd1 : exponent == 8'd126 ? 2'd2 : 2'd3;
  wire [3:0] shifted = significand >> shift;
  wire [2:0] first = exponent < 8'd125 ? 3'd0 : shifted[2:0];
  wire moved_out = (significand & ~(4'hf << shift)) != 4'd0;

  wire [1:0] biased = exponent[1:0] + 2'd1;
  wire [4:0] code = is_normal ? {biased, x[6:4]} : {2'd0, first};
  wire sticky = x[3:0] != 4'd0 || (!is_normal && moved_out);
  wire [3:0] rounded = code[4:1] + {3'd0, code[0] && (sticky || code[1])};
  wire is_beyond = x[14:0] >= {8'd130, 7'h60};
  assign y = {x[15] && !is_nan, is_beyond ? 4'hf : rounded};
endmodule
