"""``epd plan``: how many encoders and PD workers a load needs, by a discrete-event model of the system."""
