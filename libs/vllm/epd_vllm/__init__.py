"""What runs on vLLM: the EC connector, and the encoder and PD engines on ``AsyncLLM``."""
