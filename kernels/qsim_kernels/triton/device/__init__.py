"""What kernels are made of: functions that run on the device."""
