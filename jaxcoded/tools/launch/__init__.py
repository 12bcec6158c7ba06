"""Starting the ranks of a job, and ending them."""
