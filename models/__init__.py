"""Small vision-language checkpoints whose answers can be checked, and the programs that make them."""
