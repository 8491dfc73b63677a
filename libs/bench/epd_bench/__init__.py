"""``epd bench``: measures any server with OpenAI's chat interface, by workloads made from a seed."""
