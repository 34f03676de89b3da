// Float32's bits of codes of E4M3 (OCP): written by hand, the reference for the cost of emitted modules. NaN is 0x7FFFFFFF.
module decode_e4m3 (
  input wire [7:0] x,
  output wire [31:0] y
);
  wire [3:0] exponent = x[6:3];
  wire [2:0] mantissa = x[2:0];
  wire is_nan = x[6:0] == 7'h7f;
  wire is_normal = exponent != 4'd0;

  // The bias grows by 120. Below 2^-6, the first bit of the mantissa becomes the leading one.
  wire [7:0] biased = {4'd0, exponent} + 8'd120;
  wire [7:0] below = mantissa[2] ? 8'd120 : mantissa[1] ? 8'd119 : mantissa[0] ? 8'd118 : 8'd0;
  wire [2:0] behind = mantissa[2] ? {mantissa[1:0], 1'b0} : mantissa[1] ? {mantissa[0], 2'd0} : 3'd0;
  wire [10:0] number = is_normal ? {biased, mantissa} : {below, behind};
  assign y = is_nan ? 32'h7fffffff : {x[7], number, 20'd0};
endmodule
