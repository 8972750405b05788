"""Triton kernels. The only package that imports Triton; nothing outside the ops imports it."""
