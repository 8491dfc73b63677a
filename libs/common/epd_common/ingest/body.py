"""Finds the media parts of an OpenAI body and puts references in their place.

Every list of content parts that vLLM would read is walked, and only known part types pass: a part type,
or a key inside a part, that this module does not know could make the engine fetch something itself, or
put a picture's placeholder where no picture is.
"""

from __future__ import annotations
