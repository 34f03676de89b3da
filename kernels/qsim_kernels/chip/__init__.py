"""A GPU's own matrix products: in place of the emulator, where their bits are those of a sum's description, and times scales."""
