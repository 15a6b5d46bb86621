"""``tiering doctor``: what of this machine stands in the way of training, and what to do about it. No torch."""
