"""Toy deep stacks on continuous attention, trained."""
