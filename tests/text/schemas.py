"""Random JSON schemas for structured output."""

import random
from typing import Any

NAMES = ("a", "b", "key", "größe", 'q"uote', "sl/ash", "with space", "日本")
STRINGS = ("", "x", "héllo", 'a"b\\c/d\n', "👍", "true")


class Maker:
    """Draws schemas with every supported keyword, nested, with local and recursive references."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        root = self.any(3)
        if self.definitions:
            root = {**root, "$defs": self.definitions}
        return root

    def any(self, depth: int) -> dict[str, Any]:
        kinds = [self.string, self.integer, self.number, self.enum, self.const, self.simple]
        if depth > 0:
            kinds += [self.object, self.object, self.array, self.any_of, self.reference, self.tree]
        schema = self.draw.choice(kinds)(depth)
        if self.chance(0.1):
            schema["description"] = "something"
        return schema

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def simple(self, _: int) -> dict[str, Any]:
        return {"type": self.draw.choice(["null", "boolean", ["null", "boolean"]])}

    def string(self, _: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        form = self.draw.random()
        if form < 0.3:
            schema["pattern"] = self.draw.choice(
                ["^[a-z]+$", "^(foo|bar){1,3}$", "^[A-Z]{2}-[0-9]{3}$", "^x?y*z$", "ab", "^é+$"]
            )
        elif form < 0.4:
            schema["format"] = self.draw.choice(["date", "time", "uuid", "ipv4", "email"])
            return schema
        if self.chance(0.5):
            low = self.draw.randint(0, 3)
            schema["minLength"] = low
            schema["maxLength"] = low + self.draw.randint(6, 9)
        return schema

    def integer(self, _: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        low = self.draw.randint(-1000, 1000)
        if self.chance(0.4):
            schema[self.draw.choice(["minimum", "exclusiveMinimum"])] = low
        if self.chance(0.4):
            schema[self.draw.choice(["maximum", "exclusiveMaximum"])] = low + self.draw.randint(
                2, 300
            )
        if self.chance(0.1):
            schema["multipleOf"] = self.draw.choice([2, 5, 10])
        return schema

    def number(self, _: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        low = round(self.draw.uniform(-50, 50), 2)
        if self.chance(0.5):
            schema[self.draw.choice(["minimum", "exclusiveMinimum"])] = low
        if self.chance(0.5):
            schema[self.draw.choice(["maximum", "exclusiveMaximum"])] = round(
                low + self.draw.uniform(1, 60), 2
            )
        return schema

    def enum(self, _: int) -> dict[str, Any]:
        values = [*STRINGS, 0, -1, 3.5, None, True, ["a", 1], {"k": "v"}]
        return {"enum": self.draw.sample(values, self.draw.randint(1, 4))}

    def const(self, _: int) -> dict[str, Any]:
        return {"const": self.draw.choice([*STRINGS, 7, None, {"deep": [1, {"x": "y"}]}])}

    def object(self, depth: int) -> dict[str, Any]:
        names = self.draw.sample(NAMES, self.draw.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.any(depth - 1) for name in names},
            "required": [name for name in names if self.chance(0.6)],
        }
        form = self.draw.random()
        if form < 0.6:
            schema["additionalProperties"] = False
        elif form < 0.8:
            schema["additionalProperties"] = self.simple(0)
        if self.chance(0.1):
            schema["patternProperties"] = {"^n[0-9]$": {"type": "integer"}}
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.any(depth - 1)}
        if self.chance(0.2):
            schema["prefixItems"] = [self.any(0), self.any(0)]
        low = self.draw.randint(0, 2)
        schema["minItems"] = low
        schema["maxItems"] = low + self.draw.randint(0, 2)
        return schema

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth - 1) for _ in range(self.draw.randint(1, 3))]}

    def reference(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self.definitions)}"
        self.definitions[name] = True
        self.definitions[name] = self.any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def tree(self, depth: int) -> dict[str, Any]:
        name = f"tree{len(self.definitions)}"
        self.definitions[name] = {
            "type": "object",
            "properties": {
                "v": self.any(0),
                "kids": {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    def object_with_keys(self) -> dict[str, Any]:
        """A flat object with fixed keys, as function arguments are."""
        names = ["name", "street address", "größe", "is_valid", "count"]
        return {
            "type": "object",
            "properties": {name: self.any(0) for name in names},
            "required": names,
            "additionalProperties": False,
        }
