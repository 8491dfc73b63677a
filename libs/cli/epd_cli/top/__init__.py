"""``epd top``: the cluster as it is now, once a second, in a terminal or a pipe."""

from epd_cli.top.run import top

__all__ = ["top"]
