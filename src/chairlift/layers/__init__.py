"""The parts a decoder is made of: linear maps, norms, rotary positions, feed-forward blocks."""
