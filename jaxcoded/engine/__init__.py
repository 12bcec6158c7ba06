"""The communication engine: a compiled extension that carries messages over MPI."""
