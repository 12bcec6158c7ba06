"""How a round is carried from rank to rank."""
