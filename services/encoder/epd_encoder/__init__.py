"""The encoder service: pulls encode jobs, writes embeddings, announces them."""
