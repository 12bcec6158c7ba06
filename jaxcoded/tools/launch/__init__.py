"""Start and end the ranks of a job."""
