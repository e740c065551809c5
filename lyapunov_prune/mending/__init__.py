"""Let the layer before a gap stand in for the removed layers by a linear map, without training.

- `place`: where a layer can take a linear map of its output, found and verified by running it;
- `fit`: the map, in several forms, from sums over tokens; `mend`: gap by gap, with form and ridge chosen by held-out
  loss;
- `refit`: after the removal of hidden channels, fits the last matrix of a block to those that stay;
- `judge`: whether that pays, on text that was not used for fitting; `report`: what was tried and judged.

A new form is a row in `fit.FORMS` with a function from the sums to a map. `pruning` writes the maps into the weights.
"""
