// Codes of E4M3 (OCP, saturating) from float32, rounded to nearest, ties to even: written by hand, the reference for the cost of emitted modules.
module encode_e4m3 (
  input wire [31:0] x,
  output wire [7:0] y
);
  wire [7:0] exponent = x[30:23];
  wire is_nan = exponent == 8'd255 && x[22:0] != 23'd0;

  // One significand for normal and subnormal results: in each binade below 2^-6 it moves right by one more place.
  wire is_normal = exponent >= 8'd121;
  wire [4:0] significand = {1'b1, x[22:19]};
  wire [1:0] shift = exponent == 8'd120 ? 2'd1 : exponent == 8'd119 ? 2'd2 : 2'd3;
  wire [4:0] shifted = significand >> shift;
  wire [3:0] first = exponent < 8'd117 ? 4'd0 : exponent == 8'd117 ? 4'd1 : shifted[3:0];
  wire behind = x[18:0] != 19'd0;
  wire moved_out = exponent == 8'd117 ? x[22:19] != 4'd0 : (significand & ~(5'h1f << shift)) != 5'd0;

  // The code below, the bit behind it and whether there are more.
  wire [3:0] biased = exponent[3:0] - 4'd8;
  wire [7:0] code = is_normal ? {biased, x[22:19]} : {4'd0, first};
  wire sticky = behind || (!is_normal && moved_out);
  wire up = code[0] && (sticky || code[1]);
  wire [6:0] rounded = code[7:1] + {6'd0, up};

  // Beyond 448 everything saturates; between it and 464 too, because the code above is that of NaN.
  wire is_beyond = x[30:0] >= {8'd135, 23'h600000};
  assign y = {x[31] && !is_nan, is_nan ? 7'h7f : is_beyond ? 7'h7e : rounded};
endmodule
