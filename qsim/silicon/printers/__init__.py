"""Printers: graphs of operations as C, SystemVerilog and JavaScript."""
