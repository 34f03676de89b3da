// qsim_encode_e4m3_nearest.sv
// Written by qsim: the arithmetic of https://pypi.org/project/qsim-torch, to the bit.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rounds a number of fp32 = Float(8, 23, specials='ieee') to e4m3 = Float(4, 3, specials='fn').
// Rounding: nearest. The nearest value; of two equally near ones, the one whose code ends in 0.
// Overflow: magnitudes beyond the largest value become it, infinities too.
// The result is the code of the rounded number.
// Codes have 8 bits, sign and magnitude: 4 exponent bits with bias 7, 3 mantissa bits; NaN 0x7F.
// Command: qsim emit systemverilog --format e4m3 --operation encode --rounding nearest
module qsim_encode_e4m3_nearest (
  input wire [31:0] x,
  output wire [7:0] y
);
  // Decode the number; of the last bits of its fraction, it only matters whether one is set.
  wire sign = x[31];
  wire [7:0] field = x[30:23];
  wire [22:0] fraction = x[22:0];
  wire [3:0] leading = fraction[22:19];
  wire trailing = |fraction[18:0];
  wire is_nan = &field & (|leading | trailing);

  // Below the normal values, the significand moves right by one more place with each binade.
  wire is_small = field < 8'h79;
  wire is_tiny = field < 8'h75;
  wire [4:0] significand = {1'b1, leading};
  wire [1:0] distance = 2'h0 - field[1:0];
  wire [3:0] subnormal = is_tiny ? 4'h0 : significand[4:1] >> distance;
  wire [3:0] moved_out = 4'hf >> ~distance;
  wire lost = is_small & |(significand[3:0] & moved_out);

  // Magnitudes beyond the largest value have one code, and NaN has the sign of its own.
  wire negative = ~is_nan & sign;
  wire is_beyond = x[30:21] >= 10'h21f;
  wire [6:0] limit = is_nan ? 7'h7f : 7'h7e;

  // Truncate it to the code of the neighbour toward zero and the first bits that this lacks. A normal value only gets another bias.
  wire [3:0] exponent = field[3:0] + 4'h8;
  wire [7:0] normal = {exponent, leading};
  wire [7:0] truncated = is_small ? {4'h0, subnormal} : normal;
  wire [7:0] window = is_beyond ? {limit, 1'b0} : truncated;

  // Round: keep the code of the neighbour below, or add one to it.
  wire [6:0] kept = window[7:1];
  wire guard = window[0];
  wire sticky = trailing | lost;
  wire increment = guard & (sticky | kept[0]);
  wire [6:0] rounded = kept + {6'h0, increment};
  assign y = {negative, rounded};
endmodule
