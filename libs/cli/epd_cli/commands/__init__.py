"""The commands of ``epd``. Each loads what it needs when it runs, as all build the whole parser."""
