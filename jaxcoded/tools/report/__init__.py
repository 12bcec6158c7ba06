"""What the telemetry of a job says, in numbers and pictures."""
