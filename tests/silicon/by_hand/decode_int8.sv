// Float32's bits of integers of 8 bits, two's complement: written by hand, the reference for the cost of emitted modules.
module decode_int8 (
  input wire [7:0] x,
  output wire [31:0] y
);
  wire [7:0] magnitude = (x ^ {8{x[7]}}) + {7'd0, x[7]};

  // Steps of 4, 2 and 1 places bring the first bit to the front.
  wire [7:0] by_four = magnitude[7:4] == 4'd0 ? {magnitude[3:0], 4'd0} : magnitude;
  wire [7:0] by_two = by_four[7:6] == 2'd0 ? {by_four[5:0], 2'd0} : by_four;
  wire [7:0] front = by_two[7] ? by_two : {by_two[6:0], 1'b0};
  wire [2:0] places = {magnitude[7:4] == 4'd0, by_four[7:6] == 2'd0, !by_two[7]};
  wire [7:0] field = front[7] ? 8'd134 - {5'd0, places} : 8'd0;
  assign y = {x[7], field, front[6:0], 16'd0};
endmodule
