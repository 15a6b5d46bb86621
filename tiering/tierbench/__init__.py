"""tierbench: how fast a drive is, and what that means for a training step."""
