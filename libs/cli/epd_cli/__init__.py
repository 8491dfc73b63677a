"""The ``epd`` command."""
