// Float32's bits of codes of E5M2 (OCP): written by hand, the reference for the cost of emitted modules. NaN is 0x7FFFFFFF.
module decode_e5m2 (
  input wire [7:0] x,
  output wire [31:0] y
);
  wire [4:0] exponent = x[6:2];
  wire [1:0] mantissa = x[1:0];
  wire is_special = exponent == 5'd31;
  wire is_nan = is_special && mantissa != 2'd0;
  wire is_normal = exponent != 5'd0;

  // The bias grows by 112. Below 2^-14, the first bit of the mantissa becomes the leading one.
  wire [7:0] biased = {3'd0, exponent} + 8'd112;
  wire [7:0] below = mantissa[1] ? 8'd112 : mantissa[0] ? 8'd111 : 8'd0;
  wire [9:0] number = is_normal ? {is_special ? 8'd255 : biased, mantissa} : {below, mantissa[1] && mantissa[0], 1'b0};
  assign y = is_nan ? 32'h7fffffff : {x[7], number, 21'd0};
endmodule
