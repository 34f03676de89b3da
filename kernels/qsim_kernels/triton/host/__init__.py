"""The requirements of every launch: arguments, compiled forms, memory layouts."""
