// Rounds float32 to E4M3 (OCP, saturating) to nearest, ties to even, written by hand as a hardware designer would:
// the reference for the cost of the emitted module.
module round_e4m3 (
  input wire [31:0] x,
  output wire [31:0] y
);
  wire [7:0] exponent = x[30:23];
  wire [22:0] fraction = x[22:0];
  wire is_special = exponent == 8'd255;
  wire is_nan = is_special && fraction != 23'd0;

  // Normal numbers keep three bits of the fraction; each binade below 2^-6 keeps one less.
  wire [1:0] lost = exponent >= 8'd121 ? 2'd0 : exponent == 8'd120 ? 2'd1 : exponent == 8'd119 ? 2'd2 : 2'd3;
  wire [10:0] kept = x[30:20];
  wire [2:0] mask = lost == 2'd0 ? 3'b000 : lost == 2'd1 ? 3'b001 : lost == 2'd2 ? 3'b011 : 3'b111;

  // The bit after the last kept one, those behind it, and the last kept one, which is the leading one in the lowest binade.
  wire guard = lost == 2'd0 ? fraction[19] : lost == 2'd1 ? fraction[20] : lost == 2'd2 ? fraction[21] : fraction[22];
  wire behind = (fraction[18:0] != 19'd0) || (fraction[19] && lost >= 2'd1) || (fraction[20] && lost >= 2'd2) || (fraction[21] && lost == 2'd3);
  wire last = lost == 2'd0 ? fraction[20] : lost == 2'd1 ? fraction[21] : lost == 2'd2 ? fraction[22] : 1'b1;
  wire up = guard && (behind || last);

  wire [10:0] unit = {7'd0, lost == 2'd3, lost == 2'd2, lost == 2'd1, lost == 2'd0};
  wire [10:0] rounded = (kept & ~{8'd0, mask}) + (up ? unit : 11'd0);

  // Below the smallest value, 2^-9, numbers above half of it go to it.
  wire is_below = exponent < 8'd118;
  wire to_smallest = exponent == 8'd117 && fraction != 23'd0;
  wire [10:0] magnitude = is_below ? (to_smallest ? {8'd118, 3'd0} : 11'd0) : rounded;
  wire [10:0] limited = magnitude > {8'd135, 3'd6} ? {8'd135, 3'd6} : magnitude;
  assign y = is_nan ? 32'h7fffffff : {x[31], limited, 20'd0};
endmodule
