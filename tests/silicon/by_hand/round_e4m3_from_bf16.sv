// Rounds bfloat16 to E4M3 (OCP, saturating) to nearest, ties to even, as float32: written by hand, the reference for the cost of emitted
// modules. NaN is 0x7FFFFFFF.
module round_e4m3_from_bf16 (
  input wire [15:0] x,
  output wire [31:0] y
);
  wire [7:0] exponent = x[14:7];
  wire is_nan = exponent == 8'd255 && x[6:0] != 7'd0;

  // Bits that are lost in each binade below 2^-6 are ones, so that a carry passes them, and are cleared behind the adder.
  wire is_normal = exponent >= 8'd121;
  wire [2:0] lost = is_normal ? 3'b000 : exponent == 8'd120 ? 3'b001 : exponent == 8'd119 ? 3'b011 : 3'b111;
  wire guard = is_normal ? x[3] : exponent == 8'd120 ? x[4] : exponent == 8'd119 ? x[5] : exponent == 8'd118 ? x[6] : exponent == 8'd117;
  wire behind = x[2:0] != 3'd0 || (!is_normal && x[3]) || (lost[1] && x[4]) || (lost[2] && x[5]) || (exponent == 8'd117 && x[6]);
  wire last = is_normal ? x[4] : exponent == 8'd120 ? x[5] : exponent == 8'd119 ? x[6] : exponent == 8'd118;
  wire up = guard && (behind || last);
  wire [10:0] rounded = ({exponent, x[6:4]} | {8'd0, lost}) + {10'd0, up};
  wire is_zero = exponent < 8'd117 || (exponent == 8'd117 && !up);
  wire is_beyond = x[14:0] >= {8'd135, 7'h60};
  wire [10:0] magnitude = is_beyond ? {8'd135, 3'd6} : is_zero ? 11'd0 : {rounded[10:3], rounded[2:0] & ~lost};
  assign y = is_nan ? 32'h7fffffff : {x[15], magnitude, 20'd0};
endmodule
