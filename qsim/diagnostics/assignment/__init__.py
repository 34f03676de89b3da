"""Which format each layer needs: sensitivities from gradients, costs, and the search for an assignment within a budget."""
