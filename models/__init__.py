"""Small vision-language checkpoints whose answers can be checked, and what makes them."""
