"""What every launch needs: arguments, compiled forms, memory layouts."""
