-- Asks kvroute where a request goes, books it, and reports its end; for an Envoy without an endpoint
-- picker. The cluster `router` is kvroute; docs/gateways.md says what its answers hold.

local ENDPOINT = "x-gateway-destination-endpoint"

local function ask(handle, method, path, body, is_async)
  local headers = {
    [":method"] = method, [":path"] = path, [":authority"] = "localhost",
    ["content-type"] = "application/json",
  }
  return handle:httpCall("router", headers, body, 60000, is_async)
end

function envoy_on_request(handle)
  handle:headers():remove(ENDPOINT)
  local body = handle:body()
  local question = body and body:getBytes(0, body:length()) or "{}"
  local headers, answer = ask(handle, "POST", "/select_and_reserve", question, false)
  if headers[":status"] ~= "200" then
    handle:respond(
      {[":status"] = headers[":status"], ["retry-after"] = headers["retry-after"] or "1"}, answer)
    return
  end
  handle:headers():replace(ENDPOINT, answer:match('"address":"([^"]+)"'))
  local rank = answer:match('"x%-data%-parallel%-rank":"(%d+)"')
  if rank then handle:headers():replace("x-data-parallel-rank", rank) end
  local id = answer:match('"selection_id":"([^"]+)"')
  handle:streamInfo():dynamicMetadata():set("kvroute", "reservation", id)
end

function envoy_on_response(handle)
  local reserved = handle:streamInfo():dynamicMetadata():get("kvroute")
  if not reserved then return end
  local path, status = "/reservations/" .. reserved.reservation, handle:headers():get(":status")
  local usage, has_begun = nil, false
  for chunk in handle:bodyChunks() do
    if not has_begun then ask(handle, "POST", path .. "/prefill_complete", "", true) end
    has_begun = true
    usage = chunk:getBytes(0, chunk:length()):match('"usage":%s*(%b{})') or usage
  end
  local report = '{"status":' .. status .. (usage and ',"usage":' .. usage or "") .. "}"
  ask(handle, "DELETE", path, report, true)
end
