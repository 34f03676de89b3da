"""Products that modules compute by functions of torch, such as `linear` on their own parameters, rounded where they are called."""
