"""Decoding what strangers send, in processes that may die of it.

``pictures`` says what a file is; ``child`` is the program that decodes, under limits of its own; ``pool``
starts such programs and asks them. The program imports nothing but this package and Pillow, so that it
starts fast and holds no secret.
"""
