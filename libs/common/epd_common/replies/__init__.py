"""Receiving replies: one inbox subscription for all requests of a process, a bounded buffer for each."""

from epd_common.replies.hub import ReplyHub, answer_cancel
from epd_common.replies.reply import EVENT_STREAM, Reply

__all__ = ["EVENT_STREAM", "Reply", "ReplyHub", "answer_cancel"]
