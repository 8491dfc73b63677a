"""Where the rig and its scheduler, which are in two processes, meet: names in the rig's folder."""

STEPS = "steps.jsonl"
EVICTED = "evicted"
