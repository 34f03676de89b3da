// Codes of E5M2 (OCP, saturating) from float32, rounded to nearest, ties to even: written by hand, the reference for the cost of emitted modules.
module encode_e5m2 (
  input wire [31:0] x,
  output wire [7:0] y
);
  wire [7:0] exponent = x[30:23];
  wire is_nan = exponent == 8'd255 && x[22:0] != 23'd0;

  // One significand for normal and subnormal results: in each binade below 2^-14 it moves right by one more place.
  wire is_normal = exponent >= 8'd113;
  wire [3:0] significand = {1'b1, x[22:20]};
  wire [1:0] shift = exponent == 8'd112 ? 2'd1 : exponent == 8'd111 ? 2'd2 : 2'd3;
  wire [3:0] shifted = significand >> shift;
  wire [2:0] first = exponent < 8'd110 ? 3'd0 : shifted[2:0];
  wire behind = x[19:0] != 20'd0;
  wire moved_out = (significand & ~(4'hf << shift)) != 4'd0;

  // The code below, the bit behind it and whether there are more.
  wire [4:0] biased = exponent[4:0] + 5'd16;
  wire [7:0] code = is_normal ? {biased, x[22:20]} : {5'd0, first};
  wire sticky = behind || (!is_normal && moved_out);
  wire up = code[0] && (sticky || code[1]);
  wire [6:0] rounded = code[7:1] + {6'd0, up};

  // Beyond 57344 everything saturates.
  wire is_beyond = x[30:0] >= {8'd142, 23'h600000};
  assign y = {x[31] && !is_nan, is_nan ? 7'h7f : is_beyond ? 7'h7b : rounded};
endmodule
