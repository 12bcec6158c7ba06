"""What users call to sum."""
