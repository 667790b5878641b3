// Starts Swagger UI, a copy of which is served beside this file: nothing comes from elsewhere.

window.SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null, // it would send this router's address to a public server
  queryConfigEnabled: false, // nor may a link choose another document
});
