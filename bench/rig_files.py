"""Where a rig and its scheduler, which are in two processes, meet: names in a folder."""

FOLDER = "EPD_RIG_FOLDER"
"""The environment variable that names the folder."""

STEPS = "steps.jsonl"
EVICTED = "evicted"
