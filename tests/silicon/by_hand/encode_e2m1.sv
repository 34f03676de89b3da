// Codes of E2M1 (OCP, saturating) from bfloat16, rounded to nearest, ties to even: written by hand, the reference for the cost of emitted modules.
module encode_e2m1 (
  input wire [15:0] x,
  output wire [3:0] y
);
  wire [7:0] exponent = x[14:7];
  wire is_nan = exponent == 8'd255 && x[6:0] != 7'd0;

  // Half of 1, 2 and 4 have a mantissa bit; below 1 there is only 0.5.
  wire is_normal = exponent >= 8'd127;
  wire is_half = exponent == 8'd126;
  wire is_quarter = exponent == 8'd125;
  wire [1:0] biased = exponent[1:0] + 2'd2;
  wire [2:0] code = is_normal ? {biased, x[6]} : {2'd0, is_half};
  wire guard = is_normal ? x[5] : is_half ? x[6] : is_quarter;
  wire sticky = x[4:0] != 5'd0 || (!is_normal && (x[5] || (is_quarter && x[6])));
  wire [2:0] rounded = code + {2'd0, guard && (sticky || code[0])};

  // From 5 on, everything saturates; NaN has no code and gets that of 6.
  wire is_beyond = x[14:0] >= {8'd129, 7'h40};
  assign y = {x[15] && !is_nan, is_beyond ? 3'd7 : rounded};
endmodule
