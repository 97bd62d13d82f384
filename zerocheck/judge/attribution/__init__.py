"""Attribution: what wrong values are made of, without a list of known bugs."""
