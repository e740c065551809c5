"""What stands before a gap learns, without training, to stand in for the layers that are gone.

- `place`: where a layer can take a linear map of what it adds, found and proven by running it;
- `fit`: the map from sums over tokens, in several forms; `mend`: gap by gap, form and ridge by held-out loss;
- `judge`: whether that pays, by text that no map has seen; `report`: what was tried and judged.

A new form is a row in `fit.FORMS` with a function from the sums to a map. `pruning` writes the maps into the weights.
"""
