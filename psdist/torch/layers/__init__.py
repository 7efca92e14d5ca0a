"""Layers whose forward and backward passes need the other workers."""
