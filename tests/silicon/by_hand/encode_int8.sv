// Integers of 8 bits from float32, saturating, rounded to nearest, ties to even: written by hand, the reference for the cost of emitted
// modules. NaN becomes 127.
module encode_int8 (
  input wire [31:0] x,
  output wire [7:0] y
);
  wire [7:0] exponent = x[30:23];
  wire is_nan = exponent == 8'd255 && x[22:0] != 23'd0;

  // The integer part of numbers below 256, a bit behind it, and whether there are more.
  wire [8:0] significand = {1'b1, x[22:15]};
  wire [3:0] shift = 4'd6 - exponent[3:0];
  wire is_below = exponent < 8'd126;
  wire [8:0] shifted = is_below ? 9'd0 : significand >> shift;
  wire moved_out = is_below ? exponent != 8'd0 : (significand & ~(9'h1ff << shift)) != 9'd0;
  wire sticky = x[14:0] != 15'd0 || moved_out;
  wire up = shifted[0] && (sticky || shifted[1]);

  // From 127.5 on positive numbers saturate, and negative ones from 128.5 on.
  wire is_beyond = x[30:0] >= (x[31] ? {8'd134, 23'h008000} : {8'd133, 23'h7f0000});
  wire [7:0] magnitude = shifted[8:1] + {7'd0, up};
  wire [7:0] negated = (magnitude ^ {8{x[31]}}) + {7'd0, x[31]};
  assign y = is_nan ? 8'h7f : is_beyond ? {x[31], {7{!x[31]}}} : negated;
endmodule
