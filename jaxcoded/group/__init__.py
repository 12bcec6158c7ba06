"""Groups: the ranks of a communicator with a plan, and the telemetry of rounds."""
