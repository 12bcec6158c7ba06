"""Groups: a plan on the ranks of a communicator, and the telemetry of its rounds."""
