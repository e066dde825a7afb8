"""Tests of images in prompts."""
