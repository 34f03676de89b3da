// Float32's bits of codes of E2M1 (OCP): written by hand, the reference for the cost of emitted modules.
module decode_e2m1 (
  input wire [3:0] x,
  output wire [31:0] y
);
  // 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  wire [1:0] exponent = x[2:1];
  wire [7:0] field = exponent == 2'd0 ? (x[0] ? 8'd126 : 8'd0) : {6'd0, exponent} + 8'd126;
  assign y = {x[3], field, exponent != 2'd0 && x[0], 22'd0};
endmodule
