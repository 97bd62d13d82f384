"""Mutation of the judge: small errors are put into it, and the tests must see them."""
