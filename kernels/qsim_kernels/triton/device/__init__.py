"""The building blocks of kernels: functions that run on the device."""
