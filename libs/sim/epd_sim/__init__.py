"""The simulated engine: answers that prove what they were made from, in the time of a published profile."""
